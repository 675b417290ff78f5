"""A group's elements to the codes, scales and zeros of its page: the part of sealing that every page has by itself."""
