-- Prolongs leases; never shortens one, never revives a hold.
-- ARGV: now_us, epoch, lease_us, request ids

if is_lost() then
  return {'lost'}
end
local until_us = text(now_us + tonumber(ARGV[3]))
for i = 4, #ARGV do
  redis.call('ZADD', keys.leases, 'XX', 'GT', until_us, ARGV[i])
end
return {'renewed'}
