"""What masks have in common: the analyses of sections 4.2, 4.3 and C.1, over masks that exist.

recipes/analyze_masks.py runs them and writes their pictures.
"""
