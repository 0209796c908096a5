-- Service counters: each tenant's service per weight (engine/scheduling/counters.py, bands.py).

local SCALE = 1000000

-- Python's round(): halves go to the even neighbour.
local function rounded(number)
  local low = math.floor(number)
  local rest = number - low
  if rest > 0.5 or (rest == 0.5 and math.fmod(low, 2) ~= 0) then
    return low + 1
  end
  return low
end

-- A tenant's counter in a place.
local function counter_in(tenant, place)
  return tenant.counter + tenant.lift[place]
end

local function is_fair()
  return meta.order ~= 'fcfs'
end

local function scaled(cost, weight)
  return rounded(cost * SCALE / weight)
end

-- What a tenant was charged for in-flight requests and did not have yet: ChargedAhead (gateway/flow/in_flight.py),
-- gateway by gateway, so that it leaves with them.
local REQUESTS, CHARGED, AHEAD = 1, 2, 3

local function ahead_of(tenant)
  local ahead = 0
  for _, part in pairs(tenant.ahead or {}) do
    ahead = ahead + part[AHEAD]
  end
  return ahead
end

local function begin_ahead(tenant, gateway)
  tenant.ahead = tenant.ahead or {}
  local part = tenant.ahead[gateway] or {0, 0, 0}
  part[REQUESTS] = part[REQUESTS] + 1
  tenant.ahead[gateway] = part
end

local function charge_ahead(tenant, gateway, amount)
  local part = tenant.ahead[gateway]
  part[CHARGED], part[AHEAD] = part[CHARGED] + amount, part[AHEAD] + amount
end

-- A request that was charged `amount` in all is over.
local function end_ahead(tenant, gateway, amount)
  local part = tenant.ahead[gateway]
  part[REQUESTS], part[CHARGED] = part[REQUESTS] - 1, part[CHARGED] - amount
  part[AHEAD] = math.max(-part[CHARGED], math.min(part[AHEAD], part[CHARGED]))
  if part[REQUESTS] == 0 then
    tenant.ahead[gateway] = nil
  end
end

-- `gateway`: that of the in-flight request which is charged, if any.
local function charge(tenant_id, weight, cost, gateway)
  local tenant = tenants.need(tenant_id)
  tenant.counter = tenant.counter + scaled(cost, weight)
  if gateway then
    charge_ahead(tenant, gateway, scaled(cost, weight))
  end
  tenants.put(tenant_id, tenant)
  add_to('served', cost)
  for place = 1, PLACES do
    if tenant.count[place] > 0 and is_fair() then
      redis.call('ZADD', standing_key(place), counter_in(tenant, place), tenant_id)
    end
  end
end

-- Bounds the number of tenants: of those that have no request the lowest counters are dropped, and the
-- floor, where unknown tenants start, rises to the largest of them.
local function forget(most)
  if redis.call('HLEN', K.tenants) <= most then
    return
  end
  local idle = {}
  for _, id in ipairs(redis.call('HKEYS', K.tenants)) do
    local tenant = tenants.get(id)
    if tenant and num_waiting(tenant) == 0 and tenant.under_way == 0 then
      idle[#idle + 1] = {tenant.counter, id}
    end
  end
  table.sort(idle, function(one, other)
    return one[1] < other[1] or (one[1] == other[1] and one[2] < other[2])
  end)
  local floor = number_of('floor')
  for i = 1, math.min(#idle, math.ceil(most / 4)) do
    floor = math.max(floor, idle[i][1])
    tenants.drop(idle[i][2])
  end
  set_meta('floor', text(floor))
end

-- Counters stay below 2^53: where one comes near, all fall by the same, and a tenant so far behind that it
-- would be lifted on its return stands at 0. `falls` gives gateways the full number.
local HIGHEST, FALL = 2 ^ 52, 2 ^ 51
local function rebase()
  local is_high = false
  for _, tenant in pairs(tenants.known) do
    is_high = is_high or (tenant and tenant.counter >= HIGHEST)
  end
  if not is_high then
    return
  end
  for _, id in ipairs(redis.call('HKEYS', K.tenants)) do
    local tenant = tenants.get(id)
    if tenant then
      for place = 1, PLACES do
        tenant.stood[place] = tenant.stood[place] and tenant.stood[place] - FALL
      end
      tenant.counter = math.max(0, tenant.counter - FALL)
      charge(id, 1, 0)
    end
  end
  set_meta('floor', text(math.max(0, number_of('floor') - FALL)))
  for band = 0, TIERS - 1 do
    if meta['began' .. band] then
      set_meta('began' .. band, text(number_of('began' .. band) - FALL))
    end
  end
  add_to('falls', 1)
end
