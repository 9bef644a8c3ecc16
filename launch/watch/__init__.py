"""What is known of a running pipeline by watching it: for the terminal screen and for the page."""
