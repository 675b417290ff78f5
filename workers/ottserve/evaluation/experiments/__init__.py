"""The papers' findings and rival methods, simulated in plain attention, as tables that one command prints.

Nothing here serves: a method decides what attention reads in place of keys and values, in fp32. Knows no page, no slot
and no kernel but the quantiser's reference.
"""
