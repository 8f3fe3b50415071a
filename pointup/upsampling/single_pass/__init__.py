"""One pass of upsampling: candidates from the model, thinning, relaxation."""
