"""Child processes: started, listened to, killed, reaped; what their events mean."""
