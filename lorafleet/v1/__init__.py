"""The wire, generated from `protos/lorafleet/v1` by `make stubs`. Do not edit."""
