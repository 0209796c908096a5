-- Reserved service by mClock tags (gateway/flow/mclock.py).

-- Updates the tenant's entry among those that may be due.
local function restand_due(tenant_id, tenant)
  local reserved = tenant.reserved
  if reserved and reserved.rate > 0 and num_waiting(tenant) > 0 then
    redis.call('ZADD', K.due, reserved.tag_s, tenant_id)
  else
    redis.call('ZREM', K.due, tenant_id)
  end
end

-- Before a request joins a line.
local function reserve(tenant, rate)
  local reserved = tenant.reserved
  if not reserved then
    if rate <= 0 then
      return
    end
    reserved = {rate = rate, tag_s = now_s, running = 0}
    tenant.reserved = reserved
  elseif reserved.running == 0 and num_waiting(tenant) == 0 then
    reserved.tag_s = math.max(reserved.tag_s, now_s)
  end
  reserved.rate = rate
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
