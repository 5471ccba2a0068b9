"""Every producer of a mask, one file each; the file's name is the method's. What such a file
defines is said in _interface.py.
"""

NEEDS = ("Settings",)  # and score_groups or select
