-- Reserved service by mClock tags (gateway/flow/mclock.py).

-- How many of the tenant's waiting requests may go by its reservation.
local function num_on_reservation(tenant)
  local reserved, asked = tenant.reserved, tenant.asked
  if not reserved or reserved.rate <= 0 then
    return 0
  elseif reserved.tier then
    return asked and asked[reserved.tier + 1] or 0
  end
  return num_waiting(tenant)
end

-- Updates the tenant's entry among those that may be due.
local function restand_due(tenant_id, tenant)
  if num_on_reservation(tenant) > 0 then
    redis.call('ZADD', K.due, tenant.reserved.tag_s, tenant_id)
  else
    redis.call('ZREM', K.due, tenant_id)
  end
end

-- One more (1) of the tenant's requests waits that asked for a tier, or one less (-1).
local function count_asked(tenant_id, tier, sign)
  local tenant = tenants.get(tenant_id)
  tenant.asked = tenant.asked or {0, 0, 0}
  tenant.asked[tier + 1] = math.max(0, tenant.asked[tier + 1] + sign)
  tenants.put(tenant_id, tenant)
  restand_due(tenant_id, tenant)
end

-- Before a request comes, or asks for another tier: idle time before it earns nothing.
local function reservation_comes(tenant)
  local reserved = tenant.reserved
  if reserved and reserved.running == 0 and num_on_reservation(tenant) == 0 then
    reserved.tag_s = math.max(reserved.tag_s, now_s)
  end
end

-- What the tenant has reserved as of a request, before that joins a line.
local function reserve(tenant, about)
  reservation_comes(tenant)
  if not tenant.reserved and about.rate <= 0 then
    return
  end
  tenant.reserved = tenant.reserved or {tag_s = now_s, running = 0}
  tenant.reserved.rate, tenant.reserved.tier = about.rate, about.reserved_tier
end

local function reservation_granted(tenant_id, cost)
  local tenant = tenants.get(tenant_id)
  local reserved = tenant.reserved
  reserved.tag_s = math.max(reserved.tag_s, now_s - rule.reservation_burst_s) + cost / reserved.rate
  reserved.running = reserved.running + 1
  tenants.put(tenant_id, tenant)
  restand_due(tenant_id, tenant)
end

-- Corrects the tag by `cost` more (negative: less) than was counted.
local function reservation_corrected(tenant_id, cost)
  local tenant = tenants.get(tenant_id)
  if tenant.reserved and tenant.reserved.rate > 0 then
    tenant.reserved.tag_s = tenant.reserved.tag_s + cost / tenant.reserved.rate
    tenants.put(tenant_id, tenant)
    restand_due(tenant_id, tenant)
  end
end

local function reservation_ended(tenant_id)
  local tenant = tenants.get(tenant_id)
  if tenant.reserved then
    tenant.reserved.running = tenant.reserved.running - 1
    tenants.put(tenant_id, tenant)
  end
end

-- The tenant that is due longest, without those passed over.
local function first_due(passed_over)
  for _, tenant_id in ipairs(redis.call('ZRANGEBYSCORE', K.due, '-inf', now_s)) do
    if not passed_over[tenant_id] then
      return tenant_id
    end
  end
end
