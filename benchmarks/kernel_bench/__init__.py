"""Measurements of the kernels on a GPU, against floors and peers measured in the same run."""
