"""Benchmarks of the kernels: `eyas bench`, or `python -m kernels.bench`.

    cli        the commands              attention, loss   what is measured (no torch: the work is done by workers)
    runner     rounds over the workers   worker            the process that measures, ours and a peer's alike
    results    the CSV and its raw lines plot, goals       what is read out of them
    checkout   which commit this is      layouts           documents, supervised spans and active rows
    *_case     our variants              specforge_loss    the peer's variants

Nothing here is timed as a test, and every number has the error of the same computation beside it.
"""
