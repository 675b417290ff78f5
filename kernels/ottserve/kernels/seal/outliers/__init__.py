"""Which tokens of a group are outliers, and keeping them exact: the part of sealing that goes page after page."""
