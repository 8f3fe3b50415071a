"""One pass of upsampling: candidates, thinning, relaxation."""
