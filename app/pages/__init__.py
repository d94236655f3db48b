"""Serves the web pages for tenants: rendered on the server, live, with nothing from another origin.

Their figures are those of `app.insight.reports`, as the API's are.  Their forms call the API's
operations, so a page allows exactly what its reader's role allows.
"""
