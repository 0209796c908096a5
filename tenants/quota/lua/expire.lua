-- Drops holds whose lease has run out; returns their request ids, at most ARGV[4].
-- ARGV: now_us, epoch, spare, most

if is_lost() then
  return {'lost'}
end
told = ARGV[3]
local ended = redis.call('ZRANGEBYSCORE', keys.leases, '-inf', text(now_us), 'LIMIT', 0, ARGV[4])
for _, request_id in ipairs(ended) do
  local hold = find_hold(request_id)
  if hold then
    finish(request_id, hold, nil)
  else
    redis.call('ZREM', keys.leases, request_id)
  end
end
return {'expired', ended}
