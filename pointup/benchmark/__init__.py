"""The benchmark behind `pointup bench`: sampling, data loading, searches, training, upsampling."""
