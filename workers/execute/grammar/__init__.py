"""What answers that must have a form may say next."""
