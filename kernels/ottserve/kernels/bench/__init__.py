"""Times kernels on a GPU in physical units. Only ever run by hand: `python -m ottserve.kernels.bench`."""
