"""`pagewire doctor`: finds what keeps Pagewire from serving well: on this machine, in the flags, or in a running stack.

It only reads, and changes nothing. A check is a function that yields findings (`finding.py`); it reads facts about the
machine through `host.Host`.
"""
