"""Applies the patch series to a pinned PyTorch and packs, installs and checks the result.

Only the standard library is used: a user's first command needs Python, git and a C++
compiler, nothing else.
"""
