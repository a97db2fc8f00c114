"""From dataset declarations to prepared files, and benchmarks; behind the facades train_data_utils and benchmarks."""
