"""The contract that every fusion keeps, as checks that anyone can run: `fusionzoo zoo check
m:MyFusion`.

Each check builds the fusion, tries inputs that commonly break one, and raises `AssertionError` with
the smallest input that fails. All run on the CPU in float64 and evaluation mode unless they say
otherwise.
"""
