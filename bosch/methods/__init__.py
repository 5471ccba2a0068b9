"""Every way to choose a mask, one file each; the file's name is the method's name. bosch/method.py
says what such a file defines.
"""

NEEDS = ("traits", "Settings")  # and score_groups or select
