"""`pagewire tune`: finds flags for a goal by measuring on this machine.

`tree.py` says which flags may help, from what was seen; `search.py` tries them one by one against what is best so far;
`measure.py` starts a server and sends it the trace.
"""
