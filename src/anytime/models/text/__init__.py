"""Text encoders with exits, and pretrained weights for them."""
