"""What trained drafters share: their life from first weights to checkpoint, the layers, the unrolled steps, the losses."""
