"""Executors on a Ray cluster: `pagewire ray-executors`, also a process of `serve --distributed-executor-backend ray`.

Ray decides on which node an executor runs, and starts it elsewhere if the node is lost; requests never pass through
Ray. The scheduler reads addresses from a file (`pagewire.wire.discovery.file`) and calls these executors like others.
"""
