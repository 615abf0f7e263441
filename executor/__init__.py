"""The executor serves one base model on its device: process, wire, engine, and the heartbeat of steps."""
