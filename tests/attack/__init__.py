"""A seeded attack on everything that is read from disk: ``python -m tests.attack --cases 2000 --seed 0``.

A case copies small originals, mutates or crafts one of their files and runs one command. It must end in the result
of the untouched originals or in one line of ours; a file without checksums may also give other values. Whatever
else happens is a failure, printed with the seed and the number of the case.
"""
