"""Studies of key-value stores.

================  ==========================================
distributions.py  keys as YCSB draws them
systems.py        LMDB and RocksDB, to compare with a Warpwell store
ycsb.py           YCSB's workloads on a key-value store
ycsb_run.py       runs a workload and measures latencies
================  ==========================================
"""
