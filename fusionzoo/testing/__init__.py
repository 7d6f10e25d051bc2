"""The contracts of components, as checks that anyone can run: `fusionzoo zoo check my.py:MyFusion`.

A check builds the component, tries inputs that commonly break one, and raises `AssertionError` with
the smallest input that fails. `runner` names the suite of each kind of component.
"""
