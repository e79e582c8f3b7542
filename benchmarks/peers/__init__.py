"""Libraries that have no server, under the loads of `pagewire bench sweep`, in process: no HTTP, no scheduler of ours.

Each runs in an environment of its own, from this repository's root, without Pagewire's dependencies.
"""
