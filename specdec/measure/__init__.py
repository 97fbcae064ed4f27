"""What is measured and how it is shown: statistics, records of runs, serving load, benchmarks, tables and plots."""
