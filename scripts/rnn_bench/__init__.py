"""What scripts/bench_rnn.py is made of."""
