// The roles of a worker that reads Event Hubs and keeps its leases in Azure Blob, and of tools that only look.
// The hub and the container are there already, in this resource group.

param namespaceName string
param hubName string
param accountName string
param containerName string

@description('Object id of the identity of the workers.')
param workerId string

@description('Object id of who runs leases, report, explain and serve.')
param readerId string

// Built-in roles have one id in every tenant.
var dataReceiver = 'a638d3c7-ab3a-418d-83e6-5f17a39d4fde' // Azure Event Hubs Data Receiver
var blobContributor = 'ba92f5b4-2d11-453d-a403-e96b0029c9fe' // Storage Blob Data Contributor
var blobReader = '2a2b9908-6ea1-4ae2-8e65-a410df84e7d1' // Storage Blob Data Reader

resource hub 'Microsoft.EventHub/namespaces/eventhubs@2024-01-01' existing = {
  name: '${namespaceName}/${hubName}'
}

resource container 'Microsoft.Storage/storageAccounts/blobServices/containers@2023-05-01' existing = {
  name: '${accountName}/default/${containerName}'
}

resource readsTheHub 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(hub.id, workerId, dataReceiver)
  scope: hub
  properties: {
    principalId: workerId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', dataReceiver)
  }
}

resource keepsTheLeases 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(container.id, workerId, blobContributor)
  scope: container
  properties: {
    principalId: workerId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', blobContributor)
  }
}

resource readsTheLeases 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(container.id, readerId, blobReader)
  scope: container
  properties: {
    principalId: readerId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', blobReader)
  }
}
