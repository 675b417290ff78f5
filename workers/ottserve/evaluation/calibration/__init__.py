"""Which layer gets how many bits: measured on a text, chosen under a budget, written as a plan file.

In this order: `trace` runs the model once, `stored` says what pages would give back, `sensitivity` what that would
cost, `choice` what to take. Letters as in kernels/README.md: L layers, H query heads, J KV heads, D head size,
T tokens.
"""
