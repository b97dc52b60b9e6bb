"""What benchmarks, ``python -m rmsnorm_ops check`` and tests share: cases as data, the traffic model, the one timer."""
