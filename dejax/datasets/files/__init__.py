"""What stands on disk: downloads, folders of `HeteroDataset.save`, rows of features for a drive."""
