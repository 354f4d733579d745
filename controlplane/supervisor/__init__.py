"""Owns engines, links, gateway, admin and watchdogs."""
