#!/bin/sh
# The roles of a worker that reads Event Hubs and keeps its leases in Azure Blob, and of tools that only look.
# Fill in the first lines. Roles take some minutes until they are in force.
set -eu

GROUP=my-resource-group
NAMESPACE=my-namespace
HUB=orders
ACCOUNT=mystorageaccount
CONTAINER=orders-leases
WORKER=00000000-0000-0000-0000-000000000000 # object id of the workers' identity
READER=00000000-0000-0000-0000-000000000000 # object id of who runs leases, report, explain and serve

hub=$(az eventhubs eventhub show --resource-group "$GROUP" --namespace-name "$NAMESPACE" --name "$HUB" --query id --output tsv)
account=$(az storage account show --resource-group "$GROUP" --name "$ACCOUNT" --query id --output tsv)
container="$account/blobServices/default/containers/$CONTAINER"

az role assignment create --assignee-object-id "$WORKER" --assignee-principal-type ServicePrincipal \
    --role "Azure Event Hubs Data Receiver" --scope "$hub"
az role assignment create --assignee-object-id "$WORKER" --assignee-principal-type ServicePrincipal \
    --role "Storage Blob Data Contributor" --scope "$container"
az role assignment create --assignee-object-id "$READER" --assignee-principal-type ServicePrincipal \
    --role "Storage Blob Data Reader" --scope "$container"
