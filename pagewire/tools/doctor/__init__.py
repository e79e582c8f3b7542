"""`pagewire doctor`: what on this machine, in the flags, or in a running stack keeps Pagewire from serving well.

Everything is read, nothing is changed. A check is a function that yields findings (`finding.py`); what it reads of the
machine it reads through `host.Host`.
"""
