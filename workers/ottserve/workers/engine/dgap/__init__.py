"""Corrected logits for very coarse caches: a detector that says which rows are at risk, a corrector for their top K.

Source: DGAP (arXiv 2607.16248), for the shape of the idea: which features a detector reads, deltas for the likeliest
tokens alone, what training minimises. What the corrector reads of the text (`recall.py`) is ours.
"""
