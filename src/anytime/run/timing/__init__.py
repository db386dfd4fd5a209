"""Time: the clock, how long stages take (profile, forecast, pace), and hints to the operating system's scheduler."""
