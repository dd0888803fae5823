"""Experiments: the papers' tables and figures, and measurements of our kernels. Not part of the installed package.

From a checkout: ``python -m benchmarks list``, ``run`` and ``all``. `registry` names every experiment; `results` holds
the latest run on each kind of machine.
"""
