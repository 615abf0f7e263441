"""Lists what a caller may name in a request. Blocking: runs in a thread pool."""

from adapter_store import AdapterNotFound, DataLoss, Ref, Resolver
from lorafleet.v1 import inference_pb2
from scheduler.admission.identity import Identity
from scheduler.errors import InvalidRequest

DEFAULT_PAGE = 100
MAX_PAGE = 1000
BASE_NAME = "/"  # Sorts before all names of adapters.


def list_models(
    store: Resolver, identity: Identity, request: inference_pb2.ListModelsRequest
) -> tuple[list[inference_pb2.Model], str]:
    """A page of models by name, the base model first of all, and the token of the next page.

    The aliases of the caller's tenant and of the tenants that its patterns name. Raises InvalidRequest.
    """
    if request.page_size > MAX_PAGE:
        raise InvalidRequest("page_size", f"{request.page_size} is more than {MAX_PAGE}")
    page_size = request.page_size or DEFAULT_PAGE
    named = {pattern.partition("/")[0] for pattern in identity.adapters}
    tenants = {identity.tenant} | {tenant for tenant in named if not set(tenant) & set("*?[")}
    aliases = {
        f"{alias.tenant}/{alias.name}@{alias.alias}": Ref(alias.tenant, alias.name, alias=alias.alias)
        for tenant in tenants
        for alias in store.aliases(tenant)
        if identity.sees(alias.tenant, alias.name)
    }
    names = [name for name in sorted([BASE_NAME, *aliases]) if name > request.page_token]
    page = names[:page_size]
    models = [model for name in page if (model := _model(store, name, aliases.get(name)))]
    return models, page[-1] if len(names) > page_size else ""


def _model(store: Resolver, name: str, ref: Ref | None) -> inference_pb2.Model | None:
    """None when no request can have it: it went meanwhile, is draining, or is in quarantine."""
    if ref is None:
        return inference_pb2.Model()
    try:
        version = store.resolve(ref)
    except (AdapterNotFound, DataLoss):
        return None
    return inference_pb2.Model(adapter=name, digest=version.digest, max_rank=version.manifest.max_rank)
