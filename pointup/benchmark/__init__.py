"""The benchmark behind `pointup bench`: training steps, data loading, searches, upsampling."""
