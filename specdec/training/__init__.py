"""Training: conversations to tokens (`data`), what the target thinks of them (`features`), objectives (`losses`), the loop."""
