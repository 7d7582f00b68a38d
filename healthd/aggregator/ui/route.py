"""What every path of the page does alike: its feed, and errors as pages for people."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import RedirectResponse, Response

from healthd.aggregator.api.problems import problem_of
from healthd.aggregator.auth import AuthError
from healthd.aggregator.ui import rendering
from healthd.aggregator.ui.events import Feed, FullError
from healthd.core.errors import BadInputError, HealthdError


def feed_of(request: Request) -> Feed:
    """The feed of this aggregator."""
    feed: Feed = request.app.state.feed
    return feed


class PageRoute(APIRoute):
    """A path whose errors are for people: a page that says what was wrong, or the log-in."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers, with its errors as pages."""
        answer = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await answer(request)
            except HealthdError as error:
                return error_page(request, error)
            except RequestValidationError as error:
                first = error.errors()[0]
                place = " ".join(str(part) for part in first["loc"])
                return error_page(request, BadInputError(f"{place}: {first['msg']}"))

        return handler


def error_page(request: Request, error: HealthdError) -> Response:
    """Say it to a person; who is not known is sent to the log-in and comes back afterwards."""
    path, query = request.scope["path"], request.scope["query_string"].decode("latin-1")
    if isinstance(error, AuthError) and error.status == 401 and path != "/log-in":
        if request.method != "GET" or path == "/events":
            return rendering.page("error.html", status=401, visitor=None, status_code=401, said=str(error))
        asked = urlencode({"next": quote(path) + (f"?{query}" if query else "")})
        target = f"{request.app.url_path_for('log_in')}?{asked}"
        return RedirectResponse(target, status_code=303, headers=rendering.HEADERS)
    if isinstance(error, FullError):
        status, headers = 503, {"retry-after": "30"}
    else:
        problem, headers = problem_of(error)
        status = problem.status
    headers.pop("www-authenticate", None)
    return rendering.page(
        "error.html", status=status, headers=headers, visitor=None, status_code=status, said=str(error)
    )
