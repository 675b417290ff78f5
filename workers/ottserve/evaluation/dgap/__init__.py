"""Corrections of logits (`workers/engine/dgap`): traces of what a cache does, training on them, and comparison.

The seams, in order: `trace` reads texts through two caches, `loss` and `training` fit the networks, `treatments` and
`comparison` say what they are worth beside the controls.
"""
