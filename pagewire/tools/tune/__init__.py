"""`pagewire tune`: finds flags for a goal by measuring on this machine.

`tree.py` chooses flags that may help, given the measurements; `search.py` tries them one by one against the best so
far; `measure.py` starts a server and sends the trace to it.
"""
