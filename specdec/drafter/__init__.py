"""What drafters share.

trainable: the contract of training, and the loss; unroll: its rows and attention; losses: its terms; batch: its data
base: settings, weights, output layer, draft vocabulary; autoregressive: with attention, token by token; block: in one pass
shared_vocab: draft models with another vocabulary; suffix_tree: lookups
"""
