"""Training: conversations to tokens (`data`), hidden states of the target (`features`), the `loop` with its `settings`,
`state`, `metrics` and `evaluate`, and a run from a config to a drafter (`recipe`)."""
