"""HTTP requests on their way through the pipeline, and what replies of all formats share."""
