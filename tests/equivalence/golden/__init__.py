"""Golden files: what a chosen list of trainings computes, decides and generates, bitwise. The net of a
refactoring.

    python -m tests.equivalence.golden check       does this tree do what the files say? Prints what differs
    python -m tests.equivalence.golden write       makes the files anew: read the diff, and commit it
    ... check --kind trainings --only merged --folder out/golden    a part of them; other files

The equivalence tests beside this folder compare a feature with its absence, so a change of both sides passes.
Here each case is compared with what it was when its files were written:

    expected/trainings.txt   outputs, gradients and state, by digests of their bits and by sizes; rows of the
                             report
    expected/graphs.txt      joint graphs after our passes, as text: numbers for names, dtypes, sizes, tags
    expected/kernels.txt     a described GPU: our kernels by digests, matmuls with their layouts, bytes kept
                             for backward
    expected/ranks.txt       trainings of two processes: DDP, FSDP1 and FSDP2, weights gathered in FP8,
                             collectives in graphs

Bits of ordinary CPU arithmetic differ between machines: sums have other orders, functions and random numbers
other approximations. So the trainings draw multiples of an eighth, step by a power of two, and run their
graphs on reference operators in float64, where each operator rounds its result once (`hooks.widely`). What is
left of the differences is 2**-29 of a float32, and lies on a rounding boundary about once in 10**8 numbers:
the files hold for any CPU, any number of threads, and torch 2.11 to 2.15. What this cannot see: how
Inductor's code computes, and eager code around graphs.
"""
